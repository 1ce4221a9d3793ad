"""A convolutional network in Theano on real images, trained by any number of processes.

    mpirun -np 4 python ./examples/theano/cnn.py
    mpirun -np 4 python ./examples/theano/cnn.py --data FOLDER   # with CIFAR-10's files

It needs Theano 1.0.5 (docs/how-to/theano.md): PyTensor has no convolution of images. It is a complete program
for one process, and what made it one for many is marked: a line that ends with "# multiverso" was added, and
one below "# multiverso, was: ..." stood there as that.
"""

import argparse

import load_data
import numpy as np
import theano
import theano.tensor as T
from theano.tensor.nnet import conv2d
from theano.tensor.signal.pool import pool_2d

import multiverso as mv  # multiverso
from multiverso.theano_ext.sharedvar import mv_shared, sync_all_mv_shared_vars  # multiverso


def weights(random, *shape):
    """Small random weights, scaled by the number of inputs of a unit."""
    fan_in = shape[0] if len(shape) == 2 else np.prod(shape[1:])
    value = (random.randn(*shape) * np.sqrt(2 / fan_in)).astype(theano.config.floatX)
    # multiverso, was: return theano.shared(value)
    return mv_shared(value)


def zeros(*shape):
    """Variables that begin at zero."""
    # multiverso, was: return theano.shared(np.zeros(shape, theano.config.floatX))
    return mv_shared(np.zeros(shape, theano.config.floatX))


def network(x, channels, side, width, random):
    """Two convolutions of 3 x 3 with pooling, and one hidden layer; returns probabilities and parameters."""
    flat = 2 * width * (side // 4) ** 2
    w1, w2 = weights(random, width, channels, 3, 3), weights(random, 2 * width, width, 3, 3)
    w3, w4 = weights(random, flat, 4 * width), weights(random, 4 * width, 10)
    b1, b2, b3, b4 = zeros(width), zeros(2 * width), zeros(4 * width), zeros(10)

    def convolve(images, w, b):
        full = conv2d(images, w, border_mode="full")[:, :, 1:-1, 1:-1]
        return pool_2d(T.maximum(full + b.dimshuffle("x", 0, "x", "x"), 0), (2, 2), ignore_border=True)

    h = convolve(convolve(x, w1, b1), w2, b2).flatten(2)
    h = T.maximum(T.dot(h, w3) + b3, 0)
    return T.nnet.softmax(T.dot(h, w4) + b4), [w1, b1, w2, b2, w3, b3, w4, b4]


def momentum_updates(cost, params, learning_rate, momentum):
    """Stochastic gradient descent with momentum; each worker has a momentum of its own."""
    updates = []
    for param, gradient in zip(params, theano.grad(cost, params), strict=True):
        velocity = theano.shared(np.zeros_like(param.get_value(borrow=True)))
        step = np.float32(momentum) * velocity - np.float32(learning_rate) * gradient
        updates += [(velocity, step), (param, param + step)]
    return updates


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with CIFAR-10's files (default: bundled digits)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--width", type=int, default=16, help="channels of the first convolution")
    parser.add_argument("--images", type=int, help="use only the first so many images, and as many to validate")
    options = parser.parse_args()

    mv.init()  # multiverso
    x_train, y_train, x_test, y_test = load_data.load_cifar10(options.data) if options.data else load_data.load_digits()
    x_train, y_train, x_test, y_test = (a[: options.images] for a in (x_train, y_train, x_test, y_test))
    channels, side = x_train.shape[1], x_train.shape[2]

    x, y = T.tensor4("x"), T.ivector("y")
    probabilities, params = network(x, channels, side, options.width, np.random.RandomState(0))
    cost = T.mean(T.nnet.categorical_crossentropy(probabilities, y))
    updates = momentum_updates(cost, params, options.learning_rate, momentum=0.9)
    train = theano.function([x, y], cost, updates=updates, allow_input_downcast=True)
    predict = theano.function([x], T.argmax(probabilities, axis=1), allow_input_downcast=True)

    batches = len(x_train) // options.batch_size
    # multiverso, was: mine = range(batches)
    mine = range(mv.worker_id(), batches, mv.workers_num())
    mv.barrier()  # multiverso
    accuracy = 0.0
    for epoch in range(options.epochs):
        for batch in mine:
            rows = slice(batch * options.batch_size, (batch + 1) * options.batch_size)
            train(x_train[rows], y_train[rows])
            sync_all_mv_shared_vars()  # multiverso
        mv.barrier()  # multiverso
        sync_all_mv_shared_vars()  # multiverso
        # multiverso, was: if True:
        if mv.is_master_worker():
            accuracy = np.mean(predict(x_test) == y_test)
            print(f"epoch {epoch + 1}: validation accuracy {accuracy:.4f}", flush=True)

    # multiverso, was: if True:
    if mv.is_master_worker():
        # multiverso, was: workers = 1
        workers = mv.workers_num()
        print(f"workers={workers} accuracy={accuracy:.4f}", flush=True)
    mv.shutdown()  # multiverso


if __name__ == "__main__":
    main()
