"""Debugging a loop that somebody wrote by hand: what each operation took, judged by what is usual in the same loop."""
