// workload is what runs in the cluster's containers, the sandboxes' among them: it prints its environment and waits
// for its end. It is linked statically, and its image holds nothing else.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"
)

func main() {
	env := os.Environ()
	slices.Sort(env)
	for _, e := range env {
		fmt.Println(e)
	}
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, syscall.SIGINT)
	<-end
}
