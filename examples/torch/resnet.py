"""ResNet-32 (arXiv 1512.03385, section 4.2) in PyTorch, trained by any number of processes.

    multiverso run -n 4 examples/torch/resnet.py                        # bundled digits, a small ResNet
    multiverso run -n 4 --gpus auto examples/torch/resnet.py --data FOLDER --blocks 5 --epochs 82 --width 16

It is a complete program for one process, and what made it one for many is marked: a line that ends with
"# multiverso" was added, and one below "# multiverso, was: ..." stood there as that.
"""

import argparse
import time

import numpy as np
import torch
from load_data import load
from torch import nn
from torch.nn import functional as F

import multiverso as mv  # multiverso
from multiverso.torch import SharedOptimizer  # multiverso


class Block(nn.Module):
    """Two convolutions, and the shortcut around them: subsampled and padded with zeros where the size changes."""

    def __init__(self, before, after):
        super().__init__()
        self.stride = 2 if before != after else 1
        self.padding = after - before
        self.conv1 = nn.Conv2d(before, after, 3, self.stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)

    def forward(self, x):
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.padding))
        return F.relu(out + shortcut)


class ResNet(nn.Module):
    """Three stages of ``blocks`` blocks: 6 blocks + 2 layers, so 5 make ResNet-32 (464,154 parameters)."""

    def __init__(self, channels=3, blocks=5, width=16):
        super().__init__()
        layers = [nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        before = width
        for after in (width, 2 * width, 4 * width):
            for _ in range(blocks):
                layers.append(Block(before, after))
                before = after
        self.features = nn.Sequential(*layers)
        self.classify = nn.Linear(4 * width, 10)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x):
        return self.classify(self.features(x).mean(dim=(2, 3)))


def accuracy(model, x, y):
    model.eval()
    with torch.no_grad():
        right = sum((model(a).argmax(1) == b).sum().item() for a, b in zip(x.split(500), y.split(500), strict=True))
    model.train()
    return right / len(y)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with CIFAR-10's files (default: bundled digits)")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=1, help="blocks of a stage; 5 make ResNet-32")
    parser.add_argument("--width", type=int, default=8, help="channels of the first stage; 16 in ResNet-32")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--every", type=int, default=1, help="minibatches between two exchanges")
    options = parser.parse_args()

    mv.init()  # multiverso
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x_train, y_train, x_test, y_test = (torch.from_numpy(part).to(device) for part in load(options.data))
    model = ResNet(x_train.shape[1], options.blocks, options.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), options.rate, momentum=0.9, weight_decay=1e-4)
    # The learning rate falls at the middle and at three quarters, as in the originals (41 and 61 of 82).
    falls = [options.epochs // 2, options.epochs * 3 // 4]
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, falls, gamma=0.1)
    optimizer = SharedOptimizer(optimizer, model, every=options.every)  # multiverso
    started = time.perf_counter()
    for epoch in range(options.epochs):
        # multiverso, was: rows = np.random.default_rng([0, epoch]).permutation(len(x_train))
        rows = mv.shard(len(x_train), epoch)
        for batch in np.array_split(rows, max(1, len(rows) // options.batch_size)):
            optimizer.zero_grad()
            F.cross_entropy(model(x_train[batch]), y_train[batch]).backward()
            optimizer.step()
        scheduler.step()
        mv.barrier()  # multiverso
        optimizer.manager.sync_all_param()  # multiverso
        # multiverso, was: if True:
        if mv.is_master_worker():
            print(f"epoch {epoch + 1}: validation accuracy {accuracy(model, x_test, y_test):.4f}", flush=True)
    # multiverso, was: if True:
    if mv.is_master_worker():
        # multiverso, was: workers = 1
        workers = mv.workers_num()
        seconds = time.perf_counter() - started
        print(f"workers={workers} accuracy={accuracy(model, x_test, y_test):.4f} seconds={seconds:.1f}", flush=True)
    mv.shutdown()  # multiverso


if __name__ == "__main__":
    main()
