"""Shardings by rules: specs for params, and for optimizer state that follows them.

``params`` turns rules into ``PartitionSpec`` and ``NamedSharding`` trees; ``state``
gives every array of an optimizer's state the sharding of the param that it belongs to.
"""
