"""What the README claims about time and memory, rerun by one command each."""

import os

# Read when torch is loaded, or when its profiler is first used, so set before either. Threads that spin
# while they wait make a step ten times slower where another guest of the machine needs the core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler would talk on stderr, as below
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
