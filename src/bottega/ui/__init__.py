"""Console: pages about a gateway, a knowledge base, traces and evaluation runs."""
