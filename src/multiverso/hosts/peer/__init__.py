"""What outlives a connection to another node: messages, each exactly once and in order, and the frames of tables."""
