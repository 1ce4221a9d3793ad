"""A residual network (ResNet-32) in Lasagne on real images, trained by any number of processes.

    mpirun -np 4 python ./examples/theano/lasagne/Deep_Residual_Learning_CIFAR-10.py --data FOLDER   #
    CIFAR-10 mpirun -np 4 python ./examples/theano/lasagne/Deep_Residual_Learning_CIFAR-10.py --blocks 1
    --epochs 10

The network is that of He et al., "Deep Residual Learning for Image Recognition" (arXiv 1512.03385), section
4.2, with identity shortcuts: 6 n + 2 layers for n = --blocks, and 464,154 trainable parameters for n = 5.
Lasagne 0.1 has no batch normalisation, so the layer is written here. It needs Theano 1.0.5
(docs/how-to/lasagne.md).

It is a complete program for one process, and what made it one for many is marked: a line that ends with
"# multiverso" was added, and one below "# multiverso, was: ..." stood there as that.
"""

import argparse
import sys
from pathlib import Path

import lasagne
import numpy as np
import theano
import theano.tensor as T
from lasagne.layers import (
    Conv2DLayer,
    DenseLayer,
    ElemwiseSumLayer,
    GlobalPoolLayer,
    InputLayer,
    Layer,
    NonlinearityLayer,
    PadLayer,
    get_all_layers,
    get_all_params,
    get_output,
)
from lasagne.nonlinearities import rectify, softmax

import multiverso as mv  # multiverso
from multiverso.theano_ext.lasagne_ext.param_manager import LasagneParamManager  # multiverso

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import load_data


class BatchNormLayer(Layer):
    """Batch normalisation (arXiv 1502.03167) of each channel, with running statistics for prediction.

    ``updates`` has the running statistics' new values after a training output has been built; the training
    function must be given them.
    """

    def __init__(self, incoming, alpha=0.1, epsilon=1e-4, **kwargs):
        super().__init__(incoming, **kwargs)
        shape = (self.input_shape[1],)
        constant = lasagne.init.Constant
        self.keep, self.take = np.float32(1 - alpha), np.float32(alpha)
        self.epsilon, self.updates = np.float32(epsilon), []
        self.beta = self.add_param(constant(0), shape, name="beta", regularizable=False)
        self.gamma = self.add_param(constant(1), shape, name="gamma")
        self.mean = self.add_param(constant(0), shape, name="mean", trainable=False, regularizable=False)
        self.inv_std = self.add_param(constant(1), shape, name="inv_std", trainable=False, regularizable=False)

    def get_output_for(self, input, deterministic=False, **kwargs):
        if deterministic:
            mean, inv_std = self.mean, self.inv_std
        else:
            mean, inv_std = input.mean((0, 2, 3)), T.inv(T.sqrt(input.var((0, 2, 3)) + self.epsilon))
            self.updates = [
                (self.mean, self.keep * self.mean + self.take * mean),
                (self.inv_std, self.keep * self.inv_std + self.take * inv_std),
            ]
        mean, inv_std, gamma, beta = (v.dimshuffle("x", 0, "x", "x") for v in (mean, inv_std, self.gamma, self.beta))
        return (input - mean) * (gamma * inv_std) + beta


class EverySecondPixelLayer(Layer):
    """Halves width and height."""

    def get_output_for(self, input, **kwargs):
        return input[:, :, ::2, ::2]

    def get_output_shape_for(self, input_shape):
        return (*input_shape[:2], *((side + 1) // 2 for side in input_shape[2:]))


def convolution(incoming, channels, stride=1, nonlinearity=rectify):
    """A 3 x 3 convolution with batch normalisation in the place of its bias."""
    # pad=1 of a padding layer and not of the convolution: so does Theano without a compiler
    layer = Conv2DLayer(
        PadLayer(incoming, 1),
        channels,
        3,
        stride=(stride, stride),
        W=lasagne.init.HeNormal(gain="relu"),
        b=None,
        nonlinearity=None,
    )
    return NonlinearityLayer(BatchNormLayer(layer), nonlinearity)


def residual_block(incoming, channels, stride):
    """Two convolutions and the shortcut around them; where it halves the image, it pads the channels."""
    inner = convolution(convolution(incoming, channels, stride), channels, nonlinearity=None)
    if stride > 1:
        missing = channels - incoming.output_shape[1]
        incoming = PadLayer(
            EverySecondPixelLayer(incoming), [(missing // 2, missing - missing // 2), (0, 0), (0, 0)], batch_ndim=1
        )
    return NonlinearityLayer(ElemwiseSumLayer([inner, incoming]), rectify)


def build_network(x, channels, side, blocks):
    """Three stages of ``blocks`` residual blocks, with 16, 32 and 64 channels."""
    layer = convolution(InputLayer((None, channels, side, side), x), 16)
    for width in (16, 32, 64):
        for block in range(blocks):
            layer = residual_block(layer, width, stride=2 if block == 0 and width > 16 else 1)
    return DenseLayer(GlobalPoolLayer(layer), 10, W=lasagne.init.HeNormal(), nonlinearity=softmax)


def augmented(random, images):
    """Each image moved by up to 4 pixels and, every second time, mirrored."""
    side = images.shape[2]
    padded = np.pad(images, ((0, 0), (0, 0), (4, 4), (4, 4)))
    result = np.empty_like(images)
    for index, (top, left) in enumerate(random.randint(0, 9, (len(images), 2))):
        crop = padded[index, :, top : top + side, left : left + side]
        result[index] = crop[:, :, ::-1] if random.randint(2) else crop
    return result


def learning_rate(epoch, epochs):
    """0.1, a tenth of it from half of the epochs on, and a hundredth from three quarters on."""
    return 0.1 if epoch < epochs // 2 else 0.01 if epoch < epochs * 3 // 4 else 0.001


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with CIFAR-10's files (default: bundled digits)")
    parser.add_argument("--blocks", type=int, default=5, help="residual blocks in each of the three stages")
    parser.add_argument("--epochs", type=int, default=82)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--images", type=int, help="use only the first so many images, and as many to validate")
    options = parser.parse_args()

    mv.init()  # multiverso
    x_train, y_train, x_test, y_test = load_data.load_cifar10(options.data) if options.data else load_data.load_digits()
    x_train, y_train, x_test, y_test = (a[: options.images] for a in (x_train, y_train, x_test, y_test))
    mean = x_train.mean(axis=0)
    x_train, x_test = x_train - mean, x_test - mean

    x, y, rate = T.tensor4("x"), T.ivector("y"), T.scalar("rate")
    network = build_network(x, x_train.shape[1], x_train.shape[2], options.blocks)
    params = get_all_params(network, trainable=True)
    cost = lasagne.objectives.categorical_crossentropy(get_output(network), y).mean()
    cost += 1e-4 * lasagne.regularization.regularize_network_params(network, lasagne.regularization.l2)
    updates = lasagne.updates.momentum(cost, params, rate, momentum=0.9)
    for layer in get_all_layers(network):
        updates.update(getattr(layer, "updates", []))
    train = theano.function([x, y, rate], cost, updates=updates, allow_input_downcast=True)
    guess = T.argmax(get_output(network, deterministic=True), axis=1)
    predict = theano.function([x], guess, allow_input_downcast=True)

    manager = LasagneParamManager(network)  # multiverso
    # multiverso, was: worker_id, workers_num = 0, 1
    worker_id, workers_num = mv.worker_id(), mv.workers_num()
    random = np.random.RandomState(worker_id)
    if worker_id == 0:
        print(f"{lasagne.layers.count_params(network, trainable=True):,} trainable parameters", flush=True)
    mv.barrier()  # multiverso
    accuracy = 0.0
    for epoch in range(options.epochs):
        order = np.random.RandomState(epoch).permutation(len(x_train))
        mine = order[worker_id::workers_num][: len(order) // workers_num]
        for start in range(0, len(mine), options.batch_size):
            rows = mine[start : start + options.batch_size]
            images = augmented(random, x_train[rows]) if options.data else x_train[rows]
            train(images, y_train[rows], learning_rate(epoch, options.epochs))
            manager.sync_all_param()  # multiverso
        mv.barrier()  # multiverso
        manager.sync_all_param()  # multiverso
        if worker_id == 0:
            guesses = [predict(x_test[start : start + 500]) for start in range(0, len(x_test), 500)]
            accuracy = np.mean(np.concatenate(guesses) == y_test)
            print(f"epoch {epoch + 1}: validation accuracy {accuracy:.4f}", flush=True)

    if worker_id == 0:
        print(f"workers={workers_num} accuracy={accuracy:.4f}", flush=True)
    mv.shutdown()  # multiverso


if __name__ == "__main__":
    main()
