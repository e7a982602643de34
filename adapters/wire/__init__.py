"""What engines speak over HTTP: sockets and deadlines, OpenAI's words, text routes, errors, metrics."""
