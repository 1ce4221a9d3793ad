"""The experiment of the originals, made again: what do several processes cost in accuracy, and save in time?

    python examples/experiments/run.py                                    # the originals' four, digits, minutes
    python examples/experiments/run.py 0M-1G 1M-4G-10S,rule=easgd:0.2     # any other
    python examples/experiments/run.py --dataset cifar10 --folder ~/data  # ResNet-32, 82 epochs; wants GPUs

A configuration is called 0M-1G (one process without multiverso) or 1M-4G-3S (with it, 4 processes, an exchange
every 3 minibatches), where any numbers may stand; ",rule=" and ",mode=" behind it choose asgd, easgd:ALPHA,
downpour:FETCH:PUSH, averaging or local_sgd:RATE:MOMENTUM, and async, bounded or sync; ",hosts=2" spreads the processes
over two rehearsed hosts.

Written to --out: tables.md, epochs.csv, accuracy_epoch.png, accuracy_time.png, time_epoch.png.
"""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path

from plan import CIFAR10, ORIGINAL, Settings, parse_configuration

import multiverso as mv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configurations", nargs="*", default=list(ORIGINAL), metavar="CONFIGURATION")
    parser.add_argument("--dataset", choices=("digits", "cifar10"), default="digits")
    parser.add_argument("--folder", type=Path, help="where CIFAR-10's files are")
    parser.add_argument("--out", type=Path, default=Path("experiment"), help="folder for what comes out")
    for name, kind, what in (
        ("depth", int, "layers of the network, 6 n + 2"),
        ("width", int, "channels of its first stage"),
        ("batch", int, "images in a minibatch of one worker"),
        ("epochs", int, "epochs of a configuration"),
        ("rate", float, "learning rate at first"),
        ("seed", int, "of initial values, shuffles and shifts"),
    ):
        parser.add_argument(f"--{name}", type=kind, help=f"{what} (default: the data set's)")
    parser.add_argument("--drops", type=int, nargs="*", help="epochs from which the rate is a tenth")
    options = parser.parse_args()

    settings = CIFAR10 if options.dataset == "cifar10" else Settings()
    given = {field.name: getattr(options, field.name, None) for field in fields(Settings)}
    given["drops"] = None if options.drops is None else tuple(options.drops)
    settings = replace(settings, **{name: value for name, value in given.items() if value is not None})
    configurations = [parse_configuration(text) for text in options.configurations]

    import data  # here and below, as --help and a wrong argument should not wait for PyTorch

    images = data.load(settings.dataset, settings.folder)  # complains here, before anything is started
    smallest = len(images.train_labels) // max(configuration.workers for configuration in configurations)
    if smallest < settings.batch:
        raise SystemExit(f"a worker has {smallest} images only: too few for a minibatch of {settings.batch}")
    import models
    import report
    from training import train

    numbers = models.parameters(models.resnet(images.train.shape[1], images.classes, settings.depth, settings.width))
    runs: report.Runs = {}
    for number, configuration in enumerate(configurations, 1):
        print(f"[{number} of {len(configurations)}] {configuration.code}", flush=True)
        what = (settings, configuration, images)
        epochs = mv.run(train, configuration.workers, what, hosts=configuration.hosts)[0]
        runs[configuration.code] = (configuration, epochs)
        # after each, so that an interrupted experiment has results, too
        text = report.write(options.out, settings, numbers, runs)
    print(f"\n{text}\nwritten to {options.out}/")


if __name__ == "__main__":
    main()
