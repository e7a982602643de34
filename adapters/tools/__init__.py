"""Tool calls: read out of a model's text, and brought into OpenAI's one form."""
