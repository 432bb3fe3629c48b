"""As much of a nanochat checkout as the plan looks at: its flags."""

import argparse

FLAGS = (
    "run device-type depth aspect-ratio head-dim max-seq-len window-pattern num-iterations target-flops target-param-data-ratio"
    " device-batch-size total-batch-size eval-every eval-tokens core-metric-every sample-every save-every resume-from-step model-tag"
)
parser = argparse.ArgumentParser()
for flag in FLAGS.split():
    parser.add_argument("--" + flag)
