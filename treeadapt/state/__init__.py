"""What an optimizer's state holds, and how an earlier state fills a new one.

``slots`` finds the copies of the params in a state; everything else here builds on it.
"""
