"""This module owns what the backends of other services have in common: pictures as they take them, and which sampling
parameters they know.
"""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from radixlm.base.errors import BadRequest, NotServed
from radixlm.lang.params import Params

#: Values that say nothing: what a service does anyway. They are left out.
NEUTRAL: Mapping[str, Any] = {
    "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0,
    "repetition_penalty": 1.0, "min_new_tokens": 0, "ignore_eos": False, "return_logprob": False, "n": 1,
}  # fmt: skip


def telling(params: Params) -> dict[str, Any]:
    """Parameters that say something, by name."""
    return {name: value for name, value in params.said().items() if NEUTRAL.get(name) != value}


def check(name: str, params: Params, known: Mapping[str, str]) -> None:
    """Raise `NotServed` for a parameter that a service has no field for.

    Args:
        name: of the backend.
        known: parameter -> field.
    """
    for parameter in telling(params):
        if parameter not in known:
            raise NotServed(f"{name} has no parameter like {parameter}; leave it out for this backend", param=parameter)


def picture(source: str) -> tuple[str, str]:
    """(media type, base64) of a picture that is a file or a data URL; ("", URL) of one somewhere else.

    Raises:
        BadRequest: there is no such file.
    """
    if source.startswith(("http://", "https://")):
        return "", source
    if source.startswith("data:"):
        head, comma, data = source.partition(",")
        if not comma or not head.endswith(";base64"):
            raise BadRequest("an image given as a data URL must be base64: data:image/png;base64,...", param="image")
        return head.removeprefix("data:").removesuffix(";base64"), data
    try:
        content = Path(source).read_bytes()
    except OSError as error:
        raise BadRequest(f"the image {source!r} cannot be read: {error.strerror or error}", param="image") from None
    return mimetypes.guess_type(source)[0] or "image/png", base64.b64encode(content).decode()
