"""JAX's sparse matrices: their arrays under the names of their attributes.

JAX registers these classes without keys. Indices are integers, which do not train.
"""

from __future__ import annotations

from jax.experimental import sparse

from treeadapt.trees.adapters.named import adapter_of_fields

ADAPTERS = (
    adapter_of_fields(sparse.BCOO, ("data", "indices")),
    adapter_of_fields(sparse.BCSR, ("data", "indices", "indptr")),
    adapter_of_fields(sparse.COO, ("data", "row", "col")),
    adapter_of_fields(sparse.CSR, ("data", "indices", "indptr")),
    adapter_of_fields(sparse.CSC, ("data", "indices", "indptr")),
)
