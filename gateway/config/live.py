"""The configuration that holds now: one reference to a frozen `Config`, put in the place of the former one at once.

    live = Live(config)
    live.server.heartbeat_s                        # read when it is needed, and not kept
    live.config = other                            # from here on; what was read before stays as it was

Whoever has to see a reload reads through it. What a request has read keeps to it: its stream goes on as it began.
"""

from __future__ import annotations

from gateway.config.schema import Config, RetriesConfig, ServerConfig


class Live:
    __slots__ = ("config",)

    def __init__(self, config: Config) -> None:
        self.config = config

    @property
    def server(self) -> ServerConfig:
        return self.config.server

    @property
    def retries(self) -> RetriesConfig:
        return self.config.retries
