"""What an optimizer's state holds, and how an earlier state fills a new one.

``transforms/state_map`` says what each leaf of a state is; everything here reads it.
"""
