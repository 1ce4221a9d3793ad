"""Versions of a model for processes that are not workers: one publishes, any number of others read, none waits."""

from multiverso.publications.publication import Publication
from multiverso.publications.snapshot import Snapshot
from multiverso.publications.subscription import Subscription, subscribe

__all__ = ["Publication", "Snapshot", "Subscription", "subscribe"]
