"""Lock that loads one model at a time.

transformers changes torch for the whole process while it loads a model, and a second model loaded
meanwhile misses some of its weights. Two threads that import it at once get a partial module.
"""

from __future__ import annotations

import threading

LOADING = threading.RLock()  # an embedder may load others
