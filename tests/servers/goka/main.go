// A program of goka for tests that share tables and topics with it: it creates a table, or is an emitter, a processor
// that counts, or a view.
//
// Each line of JSON on standard input is a command, and is answered by a line of JSON; the program stops at the end of
// the input. goka's settings are its defaults, but for two: state is in memory, and a group without positions begins at
// the earliest message.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"log"
	"os"
	"strconv"
	"strings"

	"github.com/IBM/sarama"
	"github.com/lovoo/goka"
	"github.com/lovoo/goka/codec"
	"github.com/lovoo/goka/storage"
)

var (
	brokers = flag.String("brokers", "", "addresses of brokers, separated by commas")
	skip    = flag.String("skip", "", "prefix of keys that a view leaves out of its table")

	committed = flag.Bool("committed", false, "do not read records of aborted transactions")
)

func main() {
	flag.Parse()
	config := goka.DefaultConfig()
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	if *committed {
		config.Consumer.IsolationLevel = sarama.ReadCommitted
	}
	goka.ReplaceGlobalConfig(config)
	addresses, name := strings.Split(*brokers, ","), flag.Arg(1)
	switch flag.Arg(0) {
	case "create":
		create(addresses, name, flag.Arg(2))
	case "emit":
		emit(addresses, goka.Stream(name))
	case "process":
		process(addresses, goka.Group(name), goka.Stream(flag.Arg(2)))
	case "view":
		view(addresses, goka.Table(name))
	default:
		log.Fatalf("unknown command %q: give create TABLE PARTITIONS, emit TOPIC, process GROUP INPUT, or view TABLE", flag.Arg(0))
	}
}

// create takes no commands.
func create(addresses []string, table string, partitions string) {
	number, err := strconv.Atoi(partitions)
	check(err)
	topics, err := goka.NewTopicManager(addresses, goka.DefaultConfig(), oneReplica())
	check(err)
	check(topics.EnsureTableExists(table, number))
	check(topics.Close())
}

func oneReplica() *goka.TopicManagerConfig {
	config := goka.NewTopicManagerConfig()
	config.Table.Replication, config.Stream.Replication = 1, 1
	return config
}

// emit answers {"key": KEY, "value": TEXT} once the message is stored.
func emit(addresses []string, topic goka.Stream) {
	emitter, err := goka.NewEmitter(addresses, topic, new(codec.String))
	check(err)
	commands(func(command map[string]string) any {
		check(emitter.EmitSync(command["key"], command["value"]))
		return true
	})
	check(emitter.Finish())
}

// process counts the messages of each key, as goka's second example does, and answers any command once it is ready.
func process(addresses []string, group goka.Group, input goka.Stream) {
	count := func(ctx goka.Context, _ any) {
		found, _ := ctx.Value().(int64)
		ctx.SetValue(found + 1)
	}
	processor, err := goka.NewProcessor(
		addresses,
		goka.DefineGroup(group, goka.Input(input, new(codec.String), count), goka.Persist(new(codec.Int64))),
		goka.WithStorageBuilder(storage.MemoryBuilder()),
		goka.WithTopicManagerBuilder(goka.TopicManagerBuilderWithTopicManagerConfig(oneReplica())),
	)
	check(err)
	running(processor.Run, func() {
		commands(func(map[string]string) any {
			check(processor.WaitForReady())
			return true
		})
	})
}

// view answers {"do": "rows"} with what it has read so far, also while it recovers, and {"do": "wait"} once it has
// recovered.
func view(addresses []string, table goka.Table) {
	update := func(ctx goka.UpdateContext, rows storage.Storage, key string, value []byte) error {
		if *skip != "" && strings.HasPrefix(key, *skip) {
			return nil
		}
		return goka.DefaultUpdate(ctx, rows, key, value)
	}
	watched, err := goka.NewView(
		addresses, table, new(codec.Int64),
		goka.WithViewStorageBuilder(storage.MemoryBuilder()), goka.WithViewCallback(update),
	)
	check(err)
	running(watched.Run, func() {
		commands(func(command map[string]string) any {
			if command["do"] == "wait" {
				<-watched.WaitRunning()
				return true
			}
			return read(watched)
		})
	})
}

// row is what a view has under a key: once by iterating, and once by getting it from the partition of the key.
type row struct {
	Value any    `json:"value"`
	Error string `json:"error"`
	Got   any    `json:"got"`
}

// recovery is how far a partition is: the offsets of the last row that was read, and behind the end.
type recovery struct {
	Running bool  `json:"running"`
	Offset  int64 `json:"offset"`
	End     int64 `json:"end"`
}

func read(table *goka.View) any {
	partitions := map[int32]recovery{}
	for number, stats := range table.Stats(context.Background()).Partitions {
		running := stats.Status == goka.PartitionRunning
		partitions[number] = recovery{running, stats.Recovery.Offset, stats.Recovery.Hwm}
	}
	rows := map[string]row{}
	answer := map[string]any{"rows": rows, "partitions": partitions}
	items, err := table.Iterator()
	if err != nil {
		// A partition is not yet connected.
		return answer
	}
	defer items.Release()
	for items.Next() {
		var found row
		if found.Value, err = items.Value(); err != nil {
			found = row{Error: err.Error()}
		} else {
			found.Got, err = table.Get(items.Key())
			check(err)
		}
		rows[items.Key()] = found
	}
	check(items.Err())
	return answer
}

// running runs beside the commands, and is ended after them.
func running(run func(context.Context) error, serve func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		check(run(ctx))
		if ctx.Err() == nil {
			log.Fatal("it has stopped by itself")
		}
	}()
	serve()
	cancel()
	<-done
}

func commands(answer func(map[string]string) any) {
	lines, answers := bufio.NewScanner(os.Stdin), json.NewEncoder(os.Stdout)
	for lines.Scan() {
		var command map[string]string
		check(json.Unmarshal(lines.Bytes(), &command))
		check(answers.Encode(answer(command)))
	}
	check(lines.Err())
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
