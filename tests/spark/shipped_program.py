"""A program for `spark-submit`: `shipped_program URL SOURCE TARGET`. It copies the source and prints the result.

With an archive as a fourth argument it ships that to the executors itself; the driver has the package installed.

Where our streams cannot be read it copies a stream of lines that Spark reads itself, since sinks must still work.
"""

import sys
from pathlib import Path

from pyspark.sql import DataFrame

import broker_spark

NOT_UP = "failed to connect back"
"""Spark's error if the Python process of a source does not start within ten seconds, as on a busy machine."""

url, source, target, *archives = sys.argv[1:]
spark = broker_spark.session("shipped")
for archive in archives:
    spark.sparkContext.addPyFile(archive)
    broker_spark.register(spark)


def copy(stream: DataFrame, checkpoint: str) -> None:
    """Copies what is there now."""
    options = {"url": url, "topic": target, "checkpointLocation": str(Path(checkpoint).absolute())}
    stream.writeStream.format("broker").options(**options).trigger(availableNow=True).start().awaitTermination()


sys.stdout.write(f"from {broker_spark.__file__}\n")
rows = spark.read.format("broker").options(url=url, topic=source).load().select("value")
rows.write.format("broker").mode("append").options(url=url, topic=target).save()
sys.stdout.write("batch ok\n")
failure, attempt = NOT_UP, 0
while NOT_UP in failure and attempt < 3:
    failure, attempt = "", attempt + 1
    try:
        stream = spark.readStream.format("broker").options(url=url, topic=source).load().select("value")
        copy(stream, f"stream-{attempt}")
    except Exception as error:
        failure = " ".join(str(error).split())
if failure:
    sys.stdout.write(f"stream {failure}\n")
    lines = Path("lines").absolute()
    lines.mkdir()
    (lines / "some").write_text("line\n")
    copy(spark.readStream.text(str(lines)), "text")
    sys.stdout.write("sink ok\n")
else:
    sys.stdout.write("stream ok\n")
