from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest

from loragraph.errors import FormatError, InvalidRequestError
from loragraph.vocab.chat import MAX_SOURCE_CHARS, ChatTemplate
from loragraph.vocab.sandbox import MAX_TEXT
from loragraph.vocab.vocab import Vocab

_HI = [{"role": "user", "content": "hi"}]


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(_HI, **variables)  # type: ignore[arg-type]


def test_template_of_a_real_model(smollm: Vocab) -> None:
    """SmolLM2's own template gives the prompt that its model card shows."""
    template = ChatTemplate(smollm.chat_template() or "")
    assert template.render(_HI) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert not template.render(_HI, add_generation_prompt=False).endswith("assistant\n")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hi</s>"),
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
        ("{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% for i in range(4) %}{% if i % 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{{ {'a': 'é<\\'>', 'b': [1, none]} | tojson }}", '{"a": "é<\'>", "b": [1, null]}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% generation %}x{{ 1 }}{% endgeneration %}", "x1"),
        ("{% set ns = namespace(n=0) %}{% for m in 'ab' %}{% set ns.n = ns.n + 1 %}{% endfor %}"
         "{{ ns.n }}", "2"),
        ("{% for a in 'abc' %}{{ loop.index }}{{ loop.length }}{% if loop.last %}!{% endif %}"
         "{% endfor %}", "132333!"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') ~ m(1) }}", "<a><1>"),
        ("{{ ['a', 'b'] | map('upper') | join(',') }}", "A,B"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ 'a b'.split(' ')[-1] }}{{ ' x '.strip() }}{{ 'aXb'.replace('X', '-') }}", "bxa-b"),
        ("{{ tools is none }}{{ documents is none }}{{ missing is defined }}", "TrueTrueFalse"),
        ("{{ '%s-%d' % ('a', 2) }}{{ missing }}{{ 'a' * 3 }}{{ 2 ** 5 }}", "a-2aaa32"),
        ("{{ {'a': 1}.items() | list }}{{ (1, 2)[1:] }}", "[('a', 1)](2,)"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{% filter upper %}b{% endfilter %}", "a1B"),
        ("{% macro o(t, a=[]) %}{{ t }}{% for x in a %} {{ x[0] }}={{ x[1] }}{% endfor %}"
         "{% endmacro %}{{ o('m', [('r', 'u')] + [('n', 1)]) }}{{ o('k') }}", "m r=u n=1k"),
        ("{% for a in 'abc' %}{% for b in 'abc'[loop.index0:] %}{{ b }}{% endfor %}|{% endfor %}",
         "abc|bc|c|"),
        ("{% for a in [[1, [2]]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}",
         "12"),
        ("{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{{ v }}{% endfor %}", "a2b1"),
        ("{% for a in [] %}x{% else %}none{% endfor %}{{ 'b' if messages | length == 1 }}",
         "noneb"),
        ("{{ extra }}", "more"),
    ],
)  # fmt: skip
def test_what_chat_templates_use(source: str, expected: str) -> None:
    """The parts of Jinja that published chat templates use work as Hugging Face renders them."""
    assert render(source, extra="more") == expected


def test_current_time() -> None:
    """strftime_now formats the local time."""
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)


def test_tools_reach_the_template() -> None:
    """Tools are listed as they were given."""
    template = ChatTemplate("{% for t in tools %}{{ t | tojson }}{% endfor %}")
    assert template.render([], tools=[{"name": "f"}]) == '{"name": "f"}'


def test_refusal_of_the_template_is_the_request_error() -> None:
    """raise_exception carries its text to the caller."""
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


_DOUBLE = "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}STEP{% endfor %}{{ ns.s }}"
_HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "filtered loops": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}"
    "{% endfor %}",
    "recursive macro": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(50) }}",
    "endless macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "endless block": "{% block a %}{{ self.a() }}{% endblock %}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1, 2]) }}{{ loop([1]) }}{% endfor %}",
    "product": "{{ 'a' * 10**9 }}",
    "constant product": "{% if 'a' * 1000000000 %}{% endif %}",
    "list product": "{{ [0] * 10**9 }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "number product": "{{ (2 ** 4000) * (2 ** 4000) }}",
    "sum of texts": _DOUBLE.replace("STEP", "{% set ns.s = ns.s + ns.s %}"),
    "concatenation": _DOUBLE.replace("STEP", "{% set ns.s = ns.s ~ ns.s %}"),
    "captured output": _DOUBLE.replace(
        "STEP", "{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}"
    ),
    "shared lists": _DOUBLE.replace("STEP", "{% set ns.s = [ns.s, ns.s] %}"),
    "shared dicts": _DOUBLE.replace("STEP", "{% set ns.s = {'a': ns.s, 'b': ns.s} %}"),
    "shared dict()": _DOUBLE.replace("STEP", "{% set ns.s = dict(a=ns.s, b=ns.s) %}"),
    "shared namespaces": _DOUBLE.replace("STEP", "{% set ns.s = namespace(a=ns.s, b=ns.s) %}"),
    "own namespace": "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
    "padding filter": "{{ 'a' | center(1000000000) }}",
    "padding method": "{{ 'a'.ljust(1000000000) }}",
    "padding bytes": "{{ 'a'.encode().ljust(1000000000) }}",
    "wide number": "{{ (1).to_bytes(1000000000, 'big') }}",
    "wide format": "{{ '{:>1000000000}'.format(1) }}",
    "wide percent": "{{ '%1000000000d' % 1 }}",
    "star percent": "{{ '%*d' % (1000000000, 1) }}",
    "wide indent": "{{ 'a\\nb' | indent(1000000000) }}",
    "wide tojson": "{{ [1] | tojson(indent=1000000000) }}",
    "batch": "{{ [1] | batch(1000000000, 1) | list }}",
    "replace": "{{ ('a' * 100000) | replace('', 'b' * 100000) }}",
    "replace method": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "join": "{{ range(99999) | join('a' * 100000) }}",
    "join method": "{{ ('a' * 100000).join(['a'] * 1000) }}",
    "map of lists": "{{ ([range(99999)] * 1000) | map('list') | list | length }}",
    "map of texts": "{{ (['a' * 100000] * 50) | map('upper') | list | length }}",
    "wide time": "{{ strftime_now('%1000000000d') }}",
    "long literal": "{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "import": "{% import 'x' as y %}",
    "include": "{% include '/etc/passwd' %}",
    "class": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ raise_exception.__globals__['x'] }}",
    "mutation": "{{ messages.append(1) }}",
    "infinite literal": "{{ 1e999 }}",
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_hostile_templates_end_in_an_error(name: str) -> None:
    """No template takes the machine or leaves the sandbox: an error, soon."""
    start = time.monotonic()
    with pytest.raises((FormatError, InvalidRequestError), match="chat template"):
        ChatTemplate(_HOSTILE[name]).render(_HI, timeout_s=1.0)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("a\n{% if %}", "line 2"),
        ("{{ 'a' | nonsense }}", "No filter named 'nonsense'"),
        ("{{ " + "(" * 3000 + ")" * 3000 + " }}", "cannot be compiled"),
        ("{% for a in [1] %}" * 40 + "{% endfor %}" * 40, "cannot be compiled"),
        ("{{ " + "9" * 5000 + " }}", "cannot be compiled"),
        ("x" * (MAX_SOURCE_CHARS + 1), "characters, got"),
    ],
)
def test_sources_that_do_not_compile(source: str, part: str) -> None:
    """A template that is no Jinja, or too deep or long, is a damaged file."""
    with pytest.raises(FormatError, match="chat template") as caught:
        ChatTemplate(source)
    assert part in str(caught.value)


def test_large_messages_pass() -> None:
    """The limits are above what real conversations need."""
    source = "{% for m in messages %}{{ m['content'] + '\\n' }}{% endfor %}"
    messages = [{"role": "user", "content": "word " * 200}] * 1000
    assert len(ChatTemplate(source).render(messages)) == 1_001_000 < MAX_TEXT


def test_threads_have_budgets_of_their_own() -> None:
    """One template renders in several threads at once."""
    template = ChatTemplate("{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}")
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda n: template.render([{"content": str(n)}]), range(8)))
    assert texts == [str(n) * 1000 for n in range(8)]


GEMMA_LIKE = (
    "{{ bos_token }}{% set intro = '' %}{% set turns = messages %}"
    "{% if messages[0].role == 'system' %}"
    "{% set intro = messages[0].content + '\n\n' %}{% set turns = messages[1:] %}{% endif %}"
    "{% for turn in turns %}"
    "{% if (turn.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set role = 'model' if turn.role == 'assistant' else turn.role %}"
    "<start_of_turn>{{ role }}\n{{ intro if loop.first }}"
    "{% if turn.content is string %}{{ turn.content | trim }}"
    "{% elif turn.content is iterable %}{% for part in turn.content %}"
    "{{ part.text | trim if part.type == 'text' }}{% endfor %}"
    "{% else %}{{ raise_exception('no content') }}{% endif %}"
    "<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def test_a_template_of_gemmas_kind() -> None:
    """No system role but an intro of the first turn, "model" for the assistant, content in parts,
    and an error of its own for turns out of order."""
    template = ChatTemplate(GEMMA_LIKE, "<bos>", "<eos>")
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": " hi "}]},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "bye"},
    ]
    assert template.render(chat) == (
        "<bos><start_of_turn>user\nBe brief.\n\nhi<end_of_turn>\n<start_of_turn>model\nHello."
        "<end_of_turn>\n<start_of_turn>user\nbye<end_of_turn>\n<start_of_turn>model\n"
    )
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        template.render([*chat, {"role": "user", "content": "again"}])
