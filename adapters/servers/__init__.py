"""Programs of our own that run in a process of their own: OpenVINO's server, the fake engine's, litellm's worker."""
