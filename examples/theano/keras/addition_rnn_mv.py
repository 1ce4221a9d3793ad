"""A recurrent network in Keras 1.2.2 over Theano that learns to add, trained by any number of processes.

    KERAS_BACKEND=theano mpirun -np 4 python ./examples/theano/keras/addition_rnn_mv.py

It reads sums as text ("53+9") and writes the result as text ("62"), one character after another: an encoder
and a decoder (arXiv 1409.3215). How Keras 1.2.2 is installed on a current Python: docs/how-to/keras1.md.

It is a complete program for one process, and what made it one for many is marked: a line that ends with
"# multiverso" was added, and one below "# multiverso, was: ..." stood there as that.
"""

import argparse

import numpy as np
from keras.layers import LSTM, Activation, Dense, RepeatVector, TimeDistributed
from keras.models import Sequential
from keras.optimizers import Adam

import multiverso as mv  # multiverso
from multiverso.theano_ext.keras_ext.callbacks import MVCallback  # multiverso

CHARACTERS = "0123456789+ "


def encode(texts):
    """One-hot characters: (texts, length, characters)."""
    indices = np.array([[CHARACTERS.index(character) for character in text] for text in texts])
    return np.eye(len(CHARACTERS), dtype="float32")[indices]


def decode(values):
    """The likeliest characters of an output of the network."""
    return ["".join(CHARACTERS[index] for index in row) for row in values.argmax(axis=-1)]


def sums(count, digits, random):
    """Different questions with their answers, padded with spaces: "7+12 " and "19 "."""
    pairs = set()
    while len(pairs) < count:
        a, b = random.randint(0, 10**digits, 2)
        pairs.add((int(a), int(b)))
    questions = [f"{a}+{b}".ljust(2 * digits + 1) for a, b in sorted(pairs)]
    answers = [str(a + b).ljust(digits + 1) for a, b in sorted(pairs)]
    order = random.permutation(count)
    return [questions[i] for i in order], [answers[i] for i in order]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--digits", type=int, default=2)
    parser.add_argument("--examples", type=int, default=5000)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()

    mv.init()  # multiverso
    random = np.random.RandomState(0)
    questions, answers = sums(options.examples, options.digits, random)
    x, y = encode(questions), encode(answers)
    held_out = len(x) // 10
    x_train, y_train, x_val, y_val = x[held_out:], y[held_out:], x[:held_out], y[:held_out]

    model = Sequential()
    model.add(LSTM(options.hidden, input_shape=x.shape[1:]))
    model.add(RepeatVector(options.digits + 1))
    model.add(LSTM(options.hidden, return_sequences=True))
    model.add(TimeDistributed(Dense(len(CHARACTERS))))
    model.add(Activation("softmax"))
    model.compile(loss="categorical_crossentropy", optimizer=Adam(0.003), metrics=["accuracy"])

    # multiverso, was: callbacks = []
    callbacks = [MVCallback(model)]
    mine = slice(mv.worker_id(), None, mv.workers_num())  # multiverso
    x_train, y_train = x_train[mine], y_train[mine]  # multiverso
    mv.barrier()  # multiverso
    model.fit(x_train, y_train, batch_size=options.batch_size, nb_epoch=options.epochs, callbacks=callbacks, verbose=0)
    mv.barrier()  # multiverso
    callbacks[0].kpm.sync_all_param()  # multiverso

    # multiverso, was: if True:
    if mv.is_master_worker():
        _, accuracy = model.evaluate(x_val, y_val, verbose=0)
        for question, truth, guess in zip(questions[:5], answers, decode(model.predict(x_val[:5])), strict=False):
            print(f"{question} = {guess} ({'right' if guess == truth else 'wrong: ' + truth})", flush=True)
        # multiverso, was: workers = 1
        workers = mv.workers_num()
        print(f"workers={workers} accuracy={accuracy:.4f}", flush=True)
    mv.shutdown()  # multiverso


if __name__ == "__main__":
    main()
