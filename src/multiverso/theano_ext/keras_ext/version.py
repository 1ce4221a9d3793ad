"""Which Keras is installed. The only module that knows."""

from importlib.metadata import PackageNotFoundError, version


def keras_major() -> int:
    """Returns the first number of the installed Keras' version, without importing it.

    Raises:
        ImportError: Keras is not installed.
    """
    try:
        return int(version("keras").partition(".")[0])
    except PackageNotFoundError:
        raise ImportError(
            "multiverso.theano_ext.keras_ext needs Keras: pip install 'multiverso[keras]' installs Keras 3, "
            "and docs/how-to/keras1.md says how Keras 1.2.2 over Theano is installed on a current Python"
        ) from None
