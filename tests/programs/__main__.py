"""Random programs, killed and resumed, on one host and several: ``python tests/programs [--number N] [--seed N]``."""

from __future__ import annotations

import argparse
import sys

from comparing import Differs, compare

parser = argparse.ArgumentParser()
parser.add_argument("--number", type=int, default=100)
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
differ = 0
for seed in range(options.seed, options.seed + options.number):
    try:
        print(f"seed {seed}: the same bits: {', '.join(compare(seed))}", flush=True)
    except Differs as error:
        differ += 1
        print(error, flush=True)
print(f"{options.number} programs, {differ} of them differ")
sys.exit(1 if differ else 0)
