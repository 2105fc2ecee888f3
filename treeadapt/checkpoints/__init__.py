"""Checkpoints: leaves by label path, in the files of other libraries.

``store`` saves and loads trees; ``leaves`` says what a leaf is in a file,
``load_report`` compares what is stored with a target, and ``migrated`` shows a
checkpoint under the new names of a migration. ``files`` reads and writes a checkpoint
of any format; ``replacing`` puts new files in place; ``common`` is what the formats
share, and each format has a file: ``safetensors_file``, ``orbax_folder`` and
``schema_file``, and ``npz_file`` and ``msgpack_file``, which only read. Readers and
writers are those of the libraries, imported only when a file asks for them.
"""
