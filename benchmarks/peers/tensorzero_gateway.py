"""TensorZero's embedded gateway: PYTHON benchmarks/peers/tensorzero_gateway.py CONFIG. It prints
its address, with a port of its own choice, and serves until it is stopped."""

import signal
import sys
import warnings
from types import SimpleNamespace

from tensorzero import patch_openai_client  # type: ignore[import-not-found]

warnings.simplefilter("ignore", DeprecationWarning)
# Only the address of the client is set, so no client of the openai package is needed.
client = patch_openai_client(SimpleNamespace(), config_file=sys.argv[1], async_setup=False)
print(client.base_url, flush=True)
signal.pause()
