"""The module paths of the original binding: sharedvar, param_manager, lasagne_ext, keras_ext."""
