"""Connections to other nodes that are made again when they are cut; frames over them arrive once and in order."""
