"""GPT and Llama as ordinary modules, cut into stages. Knows nothing of how they are run."""
