"""A program for `spark-submit`: `shipped_program URL SOURCE TARGET`. It copies the source, and prints what came of it.

With an archive as a fourth argument it sends that to the executors itself, where the driver has the package installed.

Where streams cannot be read it copies a stream of lines that Spark reads itself, since sinks are to work all the same.
"""

import sys
from pathlib import Path

from pyspark.sql import DataFrame

import broker_spark

url, source, target, *archives = sys.argv[1:]
spark = broker_spark.session("shipped")
for archive in archives:
    spark.sparkContext.addPyFile(archive)
    broker_spark.register(spark)


def copy(stream: DataFrame, checkpoint: str) -> None:
    """What is there now."""
    options = {"url": url, "topic": target, "checkpointLocation": str(Path(checkpoint).absolute())}
    stream.writeStream.format("broker").options(**options).trigger(availableNow=True).start().awaitTermination()


sys.stdout.write(f"from {broker_spark.__file__}\n")
rows = spark.read.format("broker").options(url=url, topic=source).load().select("value")
rows.write.format("broker").mode("append").options(url=url, topic=target).save()
sys.stdout.write("batch ok\n")
try:
    copy(spark.readStream.format("broker").options(url=url, topic=source).load().select("value"), "stream")
except Exception as error:
    sys.stdout.write(f"stream {' '.join(str(error).split())}\n")
    lines = Path("lines").absolute()
    lines.mkdir()
    (lines / "some").write_text("line\n")
    copy(spark.readStream.text(str(lines)), "text")
    sys.stdout.write("sink ok\n")
else:
    sys.stdout.write("stream ok\n")
