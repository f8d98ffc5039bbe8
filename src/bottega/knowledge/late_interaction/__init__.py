"""Late interaction: documents as many vectors each, compared token by token."""
