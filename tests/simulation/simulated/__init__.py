"""The links of several hosts over a network that a seed decides: what runs on the wire, without sockets and clocks."""
