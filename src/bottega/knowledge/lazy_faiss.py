"""faiss, imported at first use: its import crashes under a low limit on the address space."""

from __future__ import annotations

from typing import Any

from bottega._util.native import check_address_space


def __getattr__(name: str) -> Any:
    check_address_space()
    import faiss

    return getattr(faiss, name)
