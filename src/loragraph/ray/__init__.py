"""Many replicas on Ray Serve behind one address; see docs/ray.md. Needs the extra `ray`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loragraph.ray.options import AppArgs

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["AppArgs", "build_app"]


def build_app(args: AppArgs | dict[str, Any]) -> Application:
    """The application for `serve deploy`, `serve run` and serve.run(); see AppArgs.

    ConfigError for arguments that are unknown or wrong.
    """
    from loragraph.ray.app import application  # the rest of this package works without Ray

    return application(AppArgs.checked(args))
