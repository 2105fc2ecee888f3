"""Any tree taken apart: leaves with names, and the way back.

``flatten`` lists leaves as JAX does; ``walk`` names them and remembers how to rebuild;
``views`` keeps what a structure needs, found once, and gives the view of one tree.
"""
