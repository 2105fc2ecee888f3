"""Checkpoints: leaves by label path, in the files of other libraries.

``store`` saves and loads; ``common`` is what the formats share, and each format has a
file: ``safetensors_file``, ``npz_file``, ``msgpack_file``, ``orbax_folder``. Readers
and writers are those of the libraries, imported only when a file asks for them.
"""
