"""Tokens: Megatron's indexed files, tokenizers, the built-in corpus, and how they are served."""
