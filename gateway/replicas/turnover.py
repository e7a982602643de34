"""What a new configuration of a model means for its replicas: who stays, who goes, and who stands in meanwhile. Pure.

    change = turnover(model.replicas, planned)     # planned: as if there were none yet
    change.replicas                                # in the new order, those that were there already among them
    change.new, change.gone                        # to be brought up, to be seen off

A replica that would be asked in the same way is the same one, and keeps what is known of it, its connections, and its
engine. A model is served without a gap: as long as none of its replicas is ready, those that have gone and are go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.replicas.replica import Replica


class Turnover(NamedTuple):
    replicas: list[Replica]
    new: list[Replica]
    gone: list[Replica]

    @property
    def stand_ins(self) -> list[Replica]:
        if any(replica.is_ready for replica in self.replicas):
            return []
        return [replica for replica in self.gone if replica.is_ready]

    @property
    def rotated(self) -> list[Replica]:
        """New ones that differ from their predecessors by nothing that the file shows: a secret is another."""
        return [each for each in self.new if any(each.config == former.config for former in self.gone)]


def turnover(before: Sequence[Replica], planned: Sequence[Replica]) -> Turnover:
    replicas = [next((former for former in before if former.is_same(each)), each) for each in planned]
    return Turnover(
        replicas,
        new=[each for each in replicas if each not in before],
        gone=[former for former in before if former not in replicas],
    )
