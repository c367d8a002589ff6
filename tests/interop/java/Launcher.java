import io.netty.bootstrap.ServerBootstrap;
import java.lang.reflect.Field;
import java.lang.reflect.Method;
import java.lang.reflect.Proxy;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.broker.BrokerStartup;
import org.apache.rocketmq.namesrv.NamesrvStartup;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;

/**
 * Starts Apache's name server or broker so that it listens on one address only.
 *
 * <p>4.9 has no setting for the address and listens on every interface, and so does the
 * replication port of both lines. A test may not open ports to the network, and the recording
 * proxy needs the broker's port number on a second loopback address, so the addresses are
 * replaced between the construction of the servers and their start.
 */
public final class Launcher {
    public static void main(String[] args) {
        String role = args[0];
        String address = args[1];
        String[] rest = {"-c", args[2]};
        try {
            if (role.equals("namesrv")) {
                startNameServer(address, rest);
            } else {
                startBroker(address, rest);
            }
        } catch (Exception e) {
            e.printStackTrace();
            System.exit(1); // threads that are already up would keep the process alive
        }
        System.out.println("launched " + role);
    }

    private static void startNameServer(String address, String[] args) throws Exception {
        if (hasBindAddress()) {
            NamesrvStartup.main(args);
            return;
        }
        Method create =
            NamesrvStartup.class.getMethod("createNamesrvController", String[].class);
        Object controller = create.invoke(null, (Object) args);
        controller.getClass().getMethod("initialize").invoke(controller);
        confine(field(controller, "remotingServer"), address);
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            try {
                controller.getClass().getMethod("shutdown").invoke(controller);
            } catch (ReflectiveOperationException e) {
                e.printStackTrace();
            }
        }));
        controller.getClass().getMethod("start").invoke(controller);
    }

    private static void startBroker(String address, String[] args) throws Exception {
        BrokerController controller = BrokerStartup.createBrokerController(args);
        if (!hasBindAddress()) {
            confine(field(controller, "remotingServer"), address);
            confine(field(controller, "fastRemotingServer"), address);
        }
        confineReplication(controller.getMessageStore(), address);
        BrokerStartup.start(controller);
    }

    /** In 5.x the acceptor comes into being only in init, which the broker calls on starting. */
    private static void confineReplication(Object store, String address) throws Exception {
        Field owner = find(store.getClass(), "haService");
        Object service = owner.get(store);
        if (field(service, "acceptSocketService") != null) {
            confineAcceptor(service, address);
            return;
        }
        Class<?>[] face = {owner.getType()};
        owner.set(store, Proxy.newProxyInstance(face[0].getClassLoader(), face, (p, call, args) -> {
            Object result = call.invoke(service, args);
            if (call.getName().equals("init")) {
                confineAcceptor(service, address);
            }
            return result;
        }));
    }

    private static void confineAcceptor(Object service, String address) throws Exception {
        Object acceptor = field(service, "acceptSocketService");
        Field listen = find(acceptor.getClass(), "socketAddressListen");
        listen.set(acceptor, on(address, (SocketAddress) listen.get(acceptor)));
    }

    /** Whether this version takes the address from its settings, as 5.x does. */
    private static boolean hasBindAddress() {
        for (Method method : NettyServerConfig.class.getMethods()) {
            if (method.getName().equals("setBindAddress")) {
                return true;
            }
        }
        return false;
    }

    private static void confine(Object server, String address) throws Exception {
        Field bootstrap = find(server.getClass(), "serverBootstrap");
        bootstrap.set(server, new OneAddress(address));
    }

    private static Object field(Object owner, String name) throws Exception {
        return find(owner.getClass(), name).get(owner);
    }

    private static Field find(Class<?> type, String name) throws NoSuchFieldException {
        for (Class<?> at = type; at != null; at = at.getSuperclass()) {
            try {
                Field found = at.getDeclaredField(name);
                found.setAccessible(true);
                return found;
            } catch (NoSuchFieldException e) {
                // declared further up
            }
        }
        throw new NoSuchFieldException(type + "." + name);
    }

    private static SocketAddress on(String address, SocketAddress asked) {
        return new InetSocketAddress(address, ((InetSocketAddress) asked).getPort());
    }

    private static final class OneAddress extends ServerBootstrap {
        private final String address;

        OneAddress(String address) {
            this.address = address;
        }

        @Override
        public ServerBootstrap localAddress(SocketAddress asked) {
            return super.localAddress(on(address, asked));
        }
    }
}
