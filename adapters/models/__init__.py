"""Model files: the store, what is in them, and a model's text side (chat template, tokenizer) without its weights."""
