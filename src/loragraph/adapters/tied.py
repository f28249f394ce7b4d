"""Whether the token table's pair changes a tied output head too: option, file, or the rule."""

from __future__ import annotations

from loragraph.adapters.base import OUTPUT, TOKEN_EMBD, BaseInfo
from loragraph.adapters.draft import TIED_OUTPUT_KEY, Draft


def resolve_tied_output(draft: Draft, base: BaseInfo | None) -> tuple[bool, str]:
    """Whether the token table's pair also changes the head, and a warning or "".

    The option comes first, then the file's key; without both a tied base's head follows the table,
    unless the adapter brings a pair for the head.
    """
    applies = base is not None and base.tied and TOKEN_EMBD in draft.pairs
    key = draft.scalars.get(TIED_OUTPUT_KEY)
    if not applies:
        option = "tied_output has no effect: it needs a tied base and a token_embd pair"
        return False, option if draft.tied_output is not None else ""
    if draft.tied_output is not None:
        return draft.tied_output, ""
    if isinstance(key, bool):
        return key, ""
    if OUTPUT in draft.pairs:
        return False, ""
    return True, (
        f"the base's output head is tied to {TOKEN_EMBD} and the file has no {TIED_OUTPUT_KEY}: "
        "the adapter changes both; PEFT trains the lookup alone unless ensure_weight_tying, "
        "load with tied_output=False for that"
    )
