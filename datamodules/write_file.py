"""Write a file as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_file(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path``; folders are made. Until it is complete, the old file or none is there.

    Errors: ``ValueError`` if the place cannot be written to.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as stream:
            temporary = Path(stream.name)
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; choose another place, or free some space") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
