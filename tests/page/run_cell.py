"""Runs a cell, from standard input, in a kernel of this interpreter; prints what the kernel shows, as JSON."""

import json
import sys

from jupyter_client.manager import KernelManager

manager = KernelManager()
manager.kernel_spec_manager.ensure_native_kernel = True
shown = []
manager.start_kernel()
client = manager.blocking_client()
try:
    client.start_channels()
    client.wait_for_ready(timeout=100)
    client.execute_interactive(
        sys.stdin.read(),
        timeout=100,
        output_hook=lambda message: shown.append((message["msg_type"], message["content"])),
    )
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
print(json.dumps(shown, default=str))
