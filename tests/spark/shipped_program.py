"""A program that `spark-submit --py-files` runs: `shipped_program URL TOPIC`. It prints what its reads come to."""

import sys

import broker_spark

url, topic = sys.argv[1:]
spark = broker_spark.session("shipped")
options = {"url": url, "topic": topic}
sys.stdout.write(f"from {broker_spark.__file__}\n")
sys.stdout.write(f"batch {spark.read.format('broker').options(**options).load().count()}\n")
stream = spark.readStream.format("broker").options(**options).load()
query = stream.writeStream.format("noop").trigger(availableNow=True)
try:
    query.start().awaitTermination()
except Exception as error:
    sys.stdout.write(f"stream {' '.join(str(error).split())}\n")
else:
    sys.stdout.write("stream ok\n")
