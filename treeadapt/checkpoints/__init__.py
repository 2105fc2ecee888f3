"""Checkpoints: leaves by label path, in the files of other libraries.

``save_load`` saves and loads trees. Loading goes one way: ``locating`` says which file
a name means, ``opening`` what is in it without arrays, ``migrated`` shows that under
the new names of a migration, ``deciding`` and ``load_report`` compare it with a target,
``reading`` gives arrays, and ``leaves`` turns them into leaves. ``writing`` makes new
checkpoints, which ``replacing`` puts in place. ``record`` is what the formats share,
and each format has a file: ``safetensors_file``, ``orbax_folder`` and ``schema_file``,
and ``npz_file``, ``msgpack_file`` and ``torch_file``, which only read. Readers and
writers are those of the libraries, imported only when a file asks for them;
``shard_index``, ``torch_pickle`` and ``strided_array`` are what the others read with.
"""
