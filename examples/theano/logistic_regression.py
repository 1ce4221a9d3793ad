"""Softmax regression on images of digits, in Theano or PyTensor, trained by any number of processes.

    mpirun -np 4 python ./examples/theano/logistic_regression.py
    mpirun -np 4 python ./examples/theano/logistic_regression.py --data FOLDER   # with MNIST's four files

It is a complete program for one process, and what made it one for many is marked: a line that ends with
"# multiverso" was added, and one below "# multiverso, was: ..." stood there as that.
"""

import argparse
import pickle

import load_data
import numpy as np

try:
    import theano
    import theano.tensor as T

    softmax = T.nnet.softmax
except ImportError:  # PyTensor, its successor
    import pytensor as theano
    import pytensor.tensor as T

    softmax = T.special.softmax

import multiverso as mv  # multiverso
from multiverso.theano_ext import sharedvar  # multiverso


class LogisticRegression:
    """One linear layer and a softmax."""

    def __init__(self, x, n_in, n_out):
        zeros = np.zeros((n_in, n_out), theano.config.floatX)
        # multiverso, was: self.W = theano.shared(value=zeros, name="W")
        self.W = sharedvar.mv_shared(value=zeros, name="W")
        zeros = np.zeros(n_out, theano.config.floatX)
        # multiverso, was: self.b = theano.shared(value=zeros, name="b")
        self.b = sharedvar.mv_shared(value=zeros, name="b")
        self.probabilities = softmax(T.dot(x, self.W) + self.b)
        self.params = [self.W, self.b]

    def cost(self, y):
        """The mean negative log likelihood of the labels."""
        return -T.mean(T.log(self.probabilities)[T.arange(y.shape[0]), y])

    def errors(self, y):
        """The share of wrong predictions."""
        return T.mean(T.neq(T.argmax(self.probabilities, axis=1), y))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with MNIST's four IDX files (default: bundled digits)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=0.13)
    parser.add_argument("--save", help="file for the trained model (pickle)")
    options = parser.parse_args()

    mv.init()  # multiverso
    x_train, y_train, x_test, y_test = load_data.load_mnist(options.data) if options.data else load_data.load_digits()
    x_train = x_train.reshape(len(x_train), -1).astype(theano.config.floatX)
    x_test = x_test.reshape(len(x_test), -1).astype(theano.config.floatX)

    x, y = T.matrix("x"), T.ivector("y")
    model = LogisticRegression(x, x_train.shape[1], 10)
    cost = model.cost(y)
    updates = [
        (param, param - np.asarray(options.learning_rate, theano.config.floatX) * theano.grad(cost, param))
        for param in model.params
    ]
    train = theano.function([x, y], cost, updates=updates)
    test = theano.function([x, y], model.errors(y))

    batches = len(x_train) // options.batch_size
    # multiverso, was: mine = range(batches)
    mine = range(mv.worker_id(), batches, mv.workers_num())
    mv.barrier()  # multiverso
    accuracy = 0.0
    for epoch in range(options.epochs):
        for batch in mine:
            rows = slice(batch * options.batch_size, (batch + 1) * options.batch_size)
            train(x_train[rows], y_train[rows])
            sharedvar.sync_all_mv_shared_vars()  # multiverso
        mv.barrier()  # multiverso
        sharedvar.sync_all_mv_shared_vars()  # multiverso
        accuracy = 1 - float(test(x_test, y_test))
        # multiverso, was: if True:
        if mv.is_master_worker():
            print(f"epoch {epoch + 1}: validation accuracy {accuracy:.4f}", flush=True)

    # multiverso, was: if True:
    if mv.is_master_worker():
        if options.save:
            with open(options.save, "wb") as file:
                pickle.dump(model, file)
        # multiverso, was: workers = 1
        workers = mv.workers_num()
        print(f"workers={workers} accuracy={accuracy:.4f}", flush=True)
    mv.shutdown()  # multiverso


if __name__ == "__main__":
    main()
