// Serves pstest, Google's fake of Cloud Pub/Sub in memory, on a port of the loopback interface until it is ended.
package main

import (
	"flag"
	"fmt"

	"cloud.google.com/go/pubsub/v2/pstest"
)

func main() {
	port := flag.Int("port", 0, "port to listen on; 0 chooses one")
	flag.Parse()
	fmt.Println("Serving on", pstest.NewServerWithAddress(fmt.Sprintf("127.0.0.1:%d", *port)).Addr)
	select {}
}
