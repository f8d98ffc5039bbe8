"""faiss, imported at first use: its import crashes under a low limit on the address space."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bottega._util.native import check_address_space

if TYPE_CHECKING:
    from faiss import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        check_address_space()
        import faiss

        globals()[name] = found = getattr(faiss, name)  # later uses do not call this function
        return found
