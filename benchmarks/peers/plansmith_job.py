"""One job of Plansmith: plansmith_job.py RECIPE.yaml MODEL OUTPUT"""

import os
import sys
import time
from pathlib import Path

from quantize import CalibrationTools, load_recipe, quantize_checkpoint


def main() -> None:
    recipe_path, source, output = sys.argv[1:]
    recipe = load_recipe(recipe_path)
    tools = None
    if recipe.is_calibrated:
        import builder

        tools = CalibrationTools(builder.calibration_runner)
    print(f"started after {time.process_time():.2f} CPU seconds on {len(os.sched_getaffinity(0))} cores", flush=True)
    quantize_checkpoint(Path(source), Path(output), recipe, calibration_tools=tools)


if __name__ == "__main__":
    main()
