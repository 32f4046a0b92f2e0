"""This module owns the fetching of models by hub id (`organisation/name`), through `huggingface_hub` and its cache."""

from __future__ import annotations

import re
from pathlib import Path

from radixlm.base.errors import StartupError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

#: What a decoder is made of. Weights in other formats are not fetched.
_WANTED = ["*.json", "*.jinja", "*.safetensors"]
_UNWANTED = ["original/*", "consolidated*", "onnx/*", "*.onnx.json"]


def snapshot(model: str, revision: str | None) -> Path:
    """The directory of a hub model, downloaded or from the hub's own cache.

    Raises:
        StartupError: it does not exist, may not be read, or there is no network and no copy of it.
    """
    # Slow to import, and few starts need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    named = model if revision is None else f"{model} at {revision}"
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except GatedRepoError:
        raise StartupError(f"hub model {named} asks for an agreement; accept it on its page and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise StartupError(f"the hub has no model {named}, or it is private and HF_TOKEN is not set") from None
    except RevisionNotFoundError:
        raise StartupError(f"hub model {model} has no revision {revision!r}") from None
    except HFValidationError as error:
        raise StartupError(f"{model!r} is not a hub id: {error}") from None
    except (LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StartupError(
            f"cannot fetch {named} from the hub ({reason}); check the network, or name a local directory or GGUF file"
        ) from None
