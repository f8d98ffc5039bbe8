"""One model at a time: while transformers loads one, it changes torch for the whole process, and a
second one that is loaded meanwhile ends up without some of its weights; two threads that import it
at once find it half made."""

from __future__ import annotations

import threading

LOADING = threading.RLock()  # an embedder may be made of others
