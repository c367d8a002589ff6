// Does with the Go client what it is told, line by line; runs in a process of its own.
//
// Every line of the input is a JSON object with `do` and its arguments. Every one is answered by a
// line {"done": ...} or {"failed": ...}; what consumers receive comes in between as
// {"message": ...}, and transactions that the broker asks about as {"checked": ...}.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

const deadline = 10 * time.Second

// Asked is everything that any command may be given.
type Asked struct {
	Do         string            `json:"do"`
	Group      string            `json:"group"`
	NameServer string            `json:"name_server"`
	Keys       []string          `json:"keys"`
	How        string            `json:"how"`
	Messages   []Outgoing        `json:"messages"`
	Topic      string            `json:"topic"`
	Expression string            `json:"expression"`
	SQL        string            `json:"sql"`
	Orderly    bool              `json:"orderly"`
	Broadcast  bool              `json:"broadcast"`
	Fail       map[string]int    `json:"fail"`
	Retries    int32             `json:"retries"`
	Verdicts   map[string]string `json:"verdicts"`
}

// Outgoing is a message to send.
type Outgoing struct {
	Topic       string            `json:"topic"`
	Body        string            `json:"body"`
	Tag         string            `json:"tag"`
	Keys        []string          `json:"keys"`
	Level       int               `json:"level"`
	ShardingKey string            `json:"sharding_key"`
	Properties  map[string]string `json:"properties"`
}

var (
	writing   sync.Mutex
	producers = map[string]rocketmq.Producer{}
	consumers = map[string]rocketmq.PushConsumer{}
	commands  = map[string]func(Asked) (any, error){
		"produce": produce, "send": send, "transact": transact, "consume": consume, "stop": stop,
	}
)

func main() {
	rlog.SetLogLevel("error")
	rlog.SetOutputPath("client.log")
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(make([]byte, 0, 1<<16), 1<<24)
	for lines.Scan() {
		var asked Asked
		if err := json.Unmarshal(lines.Bytes(), &asked); err != nil {
			tell("failed", err.Error())
			continue
		}
		done, err := commands[asked.Do](asked)
		if err != nil {
			tell("failed", err.Error())
		} else {
			tell("done", done)
		}
	}
	for _, each := range consumers {
		_ = each.Shutdown()
	}
	for _, each := range producers {
		_ = each.Shutdown()
	}
}

func tell(kind string, what any) {
	writing.Lock()
	defer writing.Unlock()
	_ = json.NewEncoder(os.Stdout).Encode(map[string]any{kind: what})
}

func produce(asked Asked) (any, error) {
	made, err := rocketmq.NewProducer(
		producer.WithGroupName(asked.Group),
		producer.WithNameServer(primitive.NamesrvAddr{asked.NameServer}),
		producer.WithCredentials(credentials(asked.Keys)),
		producer.WithSendMsgTimeout(deadline),
		// By the sharding key, and at random without one.
		producer.WithQueueSelector(producer.NewHashQueueSelector()),
	)
	if err != nil {
		return nil, err
	}
	producers[asked.Group] = made
	return nil, made.Start()
}

func send(asked Asked) (any, error) {
	with := producers[asked.Group]
	made := make([]*primitive.Message, 0, len(asked.Messages))
	for _, each := range asked.Messages {
		made = append(made, message(each))
	}
	results := [][]any{}
	switch asked.How {
	case "batch":
		result, err := with.SendSync(context.Background(), made...)
		if err != nil {
			return nil, err
		}
		return append(results, told(result)), nil
	case "async":
		return results, sendAsync(with, made)
	}
	for _, each := range made {
		if asked.How == "one-way" {
			if err := with.SendOneWay(context.Background(), each); err != nil {
				return nil, err
			}
			continue
		}
		result, err := with.SendSync(context.Background(), each)
		if err != nil {
			return nil, err
		}
		results = append(results, told(result))
	}
	return results, nil
}

func sendAsync(with rocketmq.Producer, made []*primitive.Message) error {
	ends := make(chan error, len(made))
	for _, each := range made {
		answered := func(_ context.Context, _ *primitive.SendResult, err error) { ends <- err }
		if err := with.SendAsync(context.Background(), answered, each); err != nil {
			return err
		}
	}
	for range made {
		select {
		case err := <-ends:
			if err != nil {
				return err
			}
		case <-time.After(deadline):
			return errors.New("an asynchronous send was not answered")
		}
	}
	return nil
}

func told(result *primitive.SendResult) []any {
	return []any{int(result.Status), result.MsgID, result.MessageQueue.QueueId, result.QueueOffset}
}

// A listener that leaves every transaction open, and decides when it is asked.
type listener struct{ verdicts map[string]string }

func (l listener) ExecuteLocalTransaction(*primitive.Message) primitive.LocalTransactionState {
	return primitive.UnkonwnState
}

func (l listener) CheckLocalTransaction(half *primitive.MessageExt) primitive.LocalTransactionState {
	body := string(half.Body)
	tell("checked", body)
	switch l.verdicts[body] {
	case "commit":
		return primitive.CommitMessageState
	case "rollback":
		return primitive.RollbackMessageState
	}
	return primitive.UnkonwnState
}

func transact(asked Asked) (any, error) {
	with, err := rocketmq.NewTransactionProducer(
		listener{asked.Verdicts},
		producer.WithGroupName(asked.Group),
		producer.WithNameServer(primitive.NamesrvAddr{asked.NameServer}),
		// Of the producers that share an instance, only the first is told of checks.
		producer.WithInstanceName(asked.Group),
	)
	if err != nil {
		return nil, err
	}
	if err := with.Start(); err != nil {
		return nil, err
	}
	for _, each := range asked.Messages {
		if _, err := with.SendMessageInTransaction(context.Background(), message(each)); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

func consume(asked Asked) (any, error) {
	options := []consumer.Option{
		consumer.WithGroupName(asked.Group),
		consumer.WithNameServer(primitive.NamesrvAddr{asked.NameServer}),
		consumer.WithCredentials(credentials(asked.Keys)),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
		consumer.WithConsumerOrder(asked.Orderly),
		consumer.WithInstance(fmt.Sprintf("%d-%s", os.Getpid(), asked.Group)),
		consumer.WithSuspendCurrentQueueTimeMillis(100 * time.Millisecond),
	}
	if asked.Retries > 0 {
		options = append(options, consumer.WithMaxReconsumeTimes(asked.Retries))
	}
	if asked.Broadcast {
		options = append(options, consumer.WithConsumerModel(consumer.BroadCasting))
	}
	made, err := rocketmq.NewPushConsumer(options...)
	if err != nil {
		return nil, err
	}
	selector := consumer.MessageSelector{Type: consumer.TAG, Expression: asked.Expression}
	if asked.SQL != "" {
		selector = consumer.MessageSelector{Type: consumer.SQL92, Expression: asked.SQL}
	}
	if err := made.Subscribe(asked.Topic, selector, handler(asked)); err != nil {
		return nil, err
	}
	consumers[asked.Group] = made
	return nil, made.Start()
}

func handler(asked Asked) func(context.Context, ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
	var guard sync.Mutex
	left := asked.Fail
	failed := consumer.ConsumeRetryLater
	if asked.Orderly {
		failed = consumer.SuspendCurrentQueueAMoment
	}
	return func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		guard.Lock()
		defer guard.Unlock()
		result := consumer.ConsumeSuccess
		for _, each := range messages {
			body := string(each.Body)
			tell("message", map[string]any{
				"group": asked.Group, "body": body, "topic": each.Topic, "tag": each.GetTags(),
				"keys": each.GetKeys(), "queue": each.Queue.QueueId, "offset": each.QueueOffset,
				"times": each.ReconsumeTimes, "properties": each.GetProperties(),
			})
			if left[body] > 0 {
				left[body]--
				result = failed
			}
		}
		return result, nil
	}
}

func stop(asked Asked) (any, error) {
	with := consumers[asked.Group]
	delete(consumers, asked.Group)
	return nil, with.Shutdown()
}

func message(wanted Outgoing) *primitive.Message {
	made := primitive.NewMessage(wanted.Topic, []byte(wanted.Body))
	made.WithProperties(map[string]string{})
	for name, value := range wanted.Properties {
		made.WithProperty(name, value)
	}
	if wanted.Tag != "" {
		made.WithTag(wanted.Tag)
	}
	if len(wanted.Keys) > 0 {
		made.WithKeys(wanted.Keys)
	}
	if wanted.ShardingKey != "" {
		made.WithShardingKey(wanted.ShardingKey)
	}
	if wanted.Level > 0 {
		made.WithDelayTimeLevel(wanted.Level)
	}
	return made
}

func credentials(keys []string) primitive.Credentials {
	if len(keys) < 2 {
		return primitive.Credentials{}
	}
	return primitive.Credentials{AccessKey: keys[0], SecretKey: keys[1]}
}
