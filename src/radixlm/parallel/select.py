"""This module owns which `Comm` connects the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixlm.base.errors import StartupError
from radixlm.parallel.base import Comm, Place
from radixlm.parallel.local import ALONE

if TYPE_CHECKING:
    import torch


def connect(place: Place, device: torch.device) -> Comm:
    """The `Comm` of this process; with several ranks it meets the others, which do the same.

    Raises:
        StartupError: they cannot be reached, or this torch cannot connect them.
    """
    if place.size == 1:
        return ALONE
    try:
        from radixlm.parallel.torch_dist import join
    except ImportError as error:
        raise StartupError(
            f"this torch is built without distributed operations ({error}): use --tensor-parallel-size 1"
        ) from None
    return join(place, device)
