"""Tokens come from a file or an environment variable, so that no configuration file and no command line holds one."""

from __future__ import annotations

import os
from pathlib import Path


def read_token(*, env: str | None, file: str | None) -> str | None:
    """The token in ``file`` if that is given, else in the environment variable ``env``; ``None`` if neither is there.

    Errors: ``ValueError`` on an unreadable file, or a token that is empty or no line of visible ASCII characters. The
    message never holds the token.
    """
    if file is not None:
        where = f"token_file {file}"
        try:
            token = Path(file).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{where} cannot be read ({type(error).__name__}): give a text file of one line"
            ) from error
    else:
        where = f"the environment variable {env}"
        if env is None or env not in os.environ:
            return None
        token = os.environ[env].strip()
    if not token or not all("!" <= character <= "~" for character in token):
        raise ValueError(f"{where} holds no usable token: expected visible ASCII characters without spaces")
    return token
